"""`autopipe checkpoint`: what checkpoints hold, whether they are whole, and trained weights as an ONNX file."""
