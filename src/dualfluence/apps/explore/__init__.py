"""`dualfluence explore`: a page where one deletes a point and watches. Needs the extra `serve`."""
