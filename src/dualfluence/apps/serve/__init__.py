"""A desk behind HTTP: requests in order, reads in parallel. Needs the extra `serve`."""
