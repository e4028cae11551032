"""The processes of a distributed run: who they are, what they tell each other, and which of them failed."""
