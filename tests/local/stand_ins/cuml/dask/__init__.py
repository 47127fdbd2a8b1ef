"""Classes that train on several workers."""
