"""TensorRT and TensorRT-RTX: networks from a bundle's graphs, plans for this box, and their execution."""
