"""What each layer would predict, and what each part adds to a prediction."""
