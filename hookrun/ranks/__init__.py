"""The processes of a distributed run: their ranks, communication between them, and failures."""
