"""What bounds requests between a client's socket and an engine's queue, in the order in which a request meets it.

1. ThrottleMiddleware (ingress/http/middleware.py), outermost in a replica's server: a Throttle lets PER_TURN requests
   into Ray Serve's handling in each turn of the event loop, so that many of them do not hold up probes. It bounds the
   pace and refuses nothing: the client waits.
2. Serve's ``max_ongoing_requests`` (app.py): twice ``ingress.max_ongoing_requests`` a replica, so that Lifecycle, which
   can say why, refuses first. Requests beyond it wait: behind HAProxy in the replica, otherwise in Serve's proxy.
3. The app's own Throttle (ingress/http/endpoint.py): the same pace for reading, checking and rendering bodies.
4. Lifecycle: ``ingress.max_ongoing_requests`` requests a replica that are not answered to the end; 429 with Retry-After
   beyond, 503 ``shutting_down`` once the replica drains.
5. Admission: ``ingress.max_queued_requests`` sequences and ``ingress.max_queued_tokens`` prompt tokens that wait for
   their first token; 429, with a Retry-After by the pace at which sequences began lately. It is asked by the bytes
   announced, by those received, and where a body turns out to hold several sequences.
6. Reservation: what one request counts for in Admission. It is an estimate by bytes first; its prompts take it over
   when they are tokenized, and it shrinks with each first token. A prompt of a request that was let in is not refused.
"""
