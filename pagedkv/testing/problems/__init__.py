"""What is drawn: problems of attention, merging and writing, and the limits that they are drawn within."""
