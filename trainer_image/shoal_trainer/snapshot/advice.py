"""What to change where an object store refuses, or cannot be reached: its own words name the cause, and rarely that.

Each store and each library has classes of its own, so the words are looked at, from the particular to the general.
"""

from __future__ import annotations

import re

_ADVICE = {
    r"\bkms:|kms key": "Let the account of these credentials use the bucket's KMS key, to encrypt and to decrypt",
    r"certificate verify failed": (
        "Set AWS_CA_BUNDLE or SSL_CERT_FILE in the container's env to the certificate of the store's authority"
    ),
    r"bucket .*does not exist|no such bucket": "Create the bucket, or correct the storage's URI",
    r"\bregion\b|location constraint|addressed using the specified endpoint|moved permanently": (
        "Set AWS_REGION (or AWS_ENDPOINT_URL) in the container's env to where the bucket is"
    ),
    r"credentials|access key|(request|jwt) signature|token .*expired|expired token|anonymous caller": (
        "Give the pods valid credentials: a service account, or a Secret in the container's env"
    ),
    r"access denied|forbidden|does not have .* access|not authorized": (
        "Let the account of these credentials read, write, list and delete in the bucket"
    ),
    r"connect( timeout on| to the) endpoint url|cannot connect to host|name resolution|name or service not known": (
        "Correct AWS_ENDPOINT_URL if it is set; else see to the pods' DNS and NetworkPolicies"
    ),
}
_NAMES = re.compile(r"\S*://\S*|\barn:\S*")
"""Of buckets, roles and hosts: a word in them tells nothing."""
_KNOWN = [(re.compile(words, re.IGNORECASE), advice) for words, advice in _ADVICE.items()]


def with_advice(reason: str) -> str:
    """The words of an outage, and after them what to change, if they tell it."""
    said = _NAMES.sub("", reason)
    advice = next((advice for words, advice in _KNOWN if words.search(said)), "")
    return f"{reason.rstrip('. ')}. {advice}" if advice else reason
