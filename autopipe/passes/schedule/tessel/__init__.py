"""Schedule search: the best schedule of any blocks, by its steady state first and its ends after."""
