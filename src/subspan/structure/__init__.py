"""What is hidden in my data?"""
