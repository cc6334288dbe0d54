"""What operators look at: /v1/requests, /v1/cluster and the page at /console."""
