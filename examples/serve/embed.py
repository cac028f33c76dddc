"""Sentence embeddings as a service: requests that come at the same time are one call of the function."""

import os

from sentence_transformers import SentenceTransformer

from sluice import serve

encoder = SentenceTransformer(os.environ["SLUICE_MODEL"])  # where the replica staged the service's `model`


@serve.model(max_batch=64, max_delay=0.005, count_tokens=lambda text: len(encoder.tokenizer(text)["input_ids"]))
def embed(texts: list[str]) -> list[list[float]]:
    """A vector for each text."""
    return encoder.encode(texts, normalize_embeddings=True)


if __name__ == "__main__":
    serve.run()
