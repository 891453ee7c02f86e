"""A desk served over HTTP: requests run in order, reads in parallel. Needs the extra `serve`."""
