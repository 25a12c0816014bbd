"""Reports for people about a bundle, and comparisons of two: pure functions between reading and writing."""
