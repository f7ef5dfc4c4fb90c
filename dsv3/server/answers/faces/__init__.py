"""Other vendors' JSON around the answers that `dsv3.server.answers` makes: requests in, pieces out, nothing generated.

Each face is a schema and a mapping. `face.Face` has what they share.
"""
