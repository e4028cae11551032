"""What task=lens computes: the residual stream of a decoder, read through its final norm and its unembedding."""
