"""The page on which you look at a training set, delete a point and watch: its data and its files."""
