"""Facts about a graph and its stages that several passes need: gradients, resharding steps, chains, micro-batches."""
