"""Events in the life of a sequence, for the timelines that an ingress replica keeps."""
