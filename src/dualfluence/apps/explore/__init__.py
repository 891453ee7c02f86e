"""`dualfluence explore`: a page on which you delete a point and watch. Needs the extra `serve`."""
