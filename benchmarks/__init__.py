"""One command per figure; see figures.py for what they share."""
