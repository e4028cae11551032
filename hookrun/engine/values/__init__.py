"""How a value that a hook sees is addressed and rebuilt: a target in it, and a part of a tensor."""
