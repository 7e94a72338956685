"""An HTTP/2 CONNECT over mutual TLS, by Python's ssl and h2: prints the status, then what came back.

Sends TEXT once the tunnel is open and waits for as many bytes; then ends its direction and waits for the peer to end
the other (THEN is "end"), or just goes (THEN is "go").

usage: connect.py HOST PORT AUTHORITY CA CERT KEY TEXT THEN
"""

import socket
import ssl
import sys

import h2.config
import h2.connection
import h2.events

host, port, authority, ca, cert, key, text, then = sys.argv[1:]

context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.minimum_version = ssl.TLSVersion.TLSv1_3
context.check_hostname = False  # The mesh knows peers by their URI.
context.load_verify_locations(ca)
context.load_cert_chain(cert, key)
context.set_alpn_protocols(["h2"])

tls = context.wrap_socket(socket.create_connection((host, int(port)), timeout=15))
assert tls.selected_alpn_protocol() == "h2", tls.selected_alpn_protocol()
names = [value for kind, value in tls.getpeercert().get("subjectAltName", ()) if kind == "URI"]
print("peer", *names)

# Its check of outgoing headers demands the :path that a CONNECT must not have (RFC 9113 section 8.5).
config = h2.config.H2Configuration(client_side=True, validate_outbound_headers=False)
connection = h2.connection.H2Connection(config)
connection.initiate_connection()
stream = connection.get_next_available_stream_id()
connection.send_headers(stream, [(":method", "CONNECT"), (":authority", authority)])
tls.sendall(connection.data_to_send())

received = b""
ended = False
while not ended and not (then == "go" and len(received) >= len(text)):
    data = tls.recv(65536)
    if not data:
        sys.exit("the connection ended early")
    for event in connection.receive_data(data):
        if isinstance(event, h2.events.ResponseReceived):
            status = dict(event.headers)[b":status"].decode()
            print("status", status)
            if status != "200":
                sys.exit(0)
            connection.send_data(stream, text.encode())
        elif isinstance(event, h2.events.DataReceived):
            received += event.data
            connection.acknowledge_received_data(event.flow_controlled_length, stream)
            if len(received) >= len(text) and then == "end":
                connection.end_stream(stream)
                then = "ending"
        elif isinstance(event, h2.events.StreamEnded):
            ended = True
        elif isinstance(event, h2.events.StreamReset):
            sys.exit(f"stream reset: {event.error_code}")
    tls.sendall(connection.data_to_send())
print("received", received.decode())
if ended:
    print("ended")
