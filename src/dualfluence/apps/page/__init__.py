"""The page where one looks at a training set, deletes a point and watches: its data and its files."""
