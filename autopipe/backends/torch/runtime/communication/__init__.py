"""Process groups, P2P sends and receives, collectives, and the store through which ranks meet."""
