"""Which tokens a call of the model computes, and which positions of them a hook is for."""
