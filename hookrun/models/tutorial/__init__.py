"""The small networks of the hook tutorials: a family of models under the names `tutorial/...`.

Most of them come with their own input, drawn in the constructor as the tutorial draws it, so that an experiment with
the tutorial's `seed` shows the tutorial's numbers whatever the data set is. Their `forward(x=None)` takes a batch,
because every training loop passes one, and ignores it. Tensors whose gradient the tutorial looks at are parameters, the
other inputs are buffers.
"""
