"""An S3 server on a free port: moto's, over HTTP, reached through s3fs. For tests of object stores."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec
import httpx
import pytest


@contextmanager
def serve_s3(bucket: str) -> Iterator[fsspec.AbstractFileSystem]:
    """A store with one bucket; address and credentials in the environment, as users have them."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    httpx.post(f"http://{host}:{port}/moto-api/reset", trust_env=False)  # buckets are the process's, not the server's
    kind = fsspec.get_filesystem_class("s3")
    kind.clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("NO_PROXY", host)
        fs = fsspec.filesystem("s3", use_listings_cache=False)
        fs.mkdir(bucket)
        yield fs
    kind.clear_instance_cache()
    server.stop()
