"""What is typed: composed, checked and run as one job or many."""
