"""One folder for each question: its task, what it computes, its records and its page."""
