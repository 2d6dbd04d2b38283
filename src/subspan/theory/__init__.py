"""What does theory predict for this network?"""
