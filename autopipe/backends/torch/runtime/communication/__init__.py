"""Process groups, P2P sends and receives, collectives, and the signed rendezvous store."""
