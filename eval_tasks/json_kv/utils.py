"""Documents of the JSON tasks; scores come from the package."""

from typing import Any

from rope_patch.harness.tasks import Documents, retrieval_documents

__all__ = ["pairs"]


def pairs(**options: Any) -> Documents:
    """A JSON object of UUIDs, the value of one key asked for."""
    return retrieval_documents("json_kv", **options)
