"""The user's training data: any worker can read any range or file, and read it again."""
