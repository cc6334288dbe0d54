"""What is told of the turns in a sequence's life, for the timelines that an ingress keeps."""
