"""uvicorn's HTTP/1.1 protocol with limits on a request's head."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


def limited_protocol(max_head_bytes: int, max_headers: int) -> type[HttpToolsProtocol]:
    """The protocol class that answers 400 to a request whose head is unfinished after ``max_head_bytes``, or that has
    more than ``max_headers`` fields, and closes the connection."""

    class Limited(HttpToolsProtocol):
        _head_bytes = 0
        _in_head = True

        def data_received(self, data: bytes) -> None:
            self._head_bytes += len(data)
            super().data_received(data)
            if self._in_head and self._head_bytes > max_head_bytes and not self.transport.is_closing():
                self.send_400_response(f"The request's head is longer than {max_head_bytes} bytes.")

        def on_message_begin(self) -> None:
            self._in_head, self._head_bytes = True, 0
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if len(self.headers) >= max_headers:
                raise ValueError(f"more than {max_headers} header fields")  # answered with 400
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head, self._head_bytes = True, 0
            super().on_message_complete()

    return Limited
