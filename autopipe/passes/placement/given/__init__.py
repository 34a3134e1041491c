"""A placement that is taken as it is written."""
