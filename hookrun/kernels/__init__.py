"""What is compiled on the machine that it runs on, where that has a C compiler; torch alone does the same elsewhere."""


class NoLibrary(Exception):
    """Why nothing is compiled here."""
