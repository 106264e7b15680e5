"""What operator and trainer derive from the job's key, which is never sent."""

from __future__ import annotations

import hashlib
import hmac


def status_token(key: bytes) -> str:
    """The bearer token of the status endpoint, derived from the job's key, which is never sent."""
    return hmac.new(key, b"shoal/v1/status", hashlib.sha256).hexdigest()


def job_key(install_key: bytes, job_uid: str, key_id: str) -> bytes:
    """The 32-byte key of a run: HMAC-SHA256(install key, job uid, key id), so the operator need not read Secrets."""
    return hmac.new(install_key, f"shoal/v1/job\0{job_uid}\0{key_id}".encode(), hashlib.sha256).digest()
