"""How the devices of one group may share a model's nodes: what several strategies ask of a graph."""
