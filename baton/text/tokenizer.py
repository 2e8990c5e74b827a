"""A model's tokenizer: text to ids, ids to text, an id to its bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from baton.core.errors import InvalidRequest, ModelError, TokenizerMissing
from baton.text.model_files import eos_token_ids, special_token_texts
from baton.text.vocabulary import Piece, Pieces, parse_decoder


class Tokenizer:
    """One tokenizer.json. Safe to use from several threads; made by ``load_tokenizer``.

    ``eos_ids`` end a generation, ``bos_id`` opens a text (None: the model has none), ``special_ids`` are the tokens
    that ``decode`` leaves out.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        pieces: Pieces,
        *,
        special_ids: frozenset[int] = frozenset(),
        eos_ids: tuple[int, ...] = (),
        bos_id: int | None = None,
    ) -> None:
        self._backend = backend
        self._cache: dict[int, Piece] = {}
        self.pieces = pieces
        self.special_ids = special_ids
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """The highest id plus one. A model's embedding may have more rows; their ids have no text."""
        self.longest_token_bytes = max((len(_as_bytes(pieces.parse(token))) for token in vocabulary), default=0) or 1
        """Bytes of the longest token that text can turn into; at least 1."""

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Turn text into ids. The text of a special token becomes that token; ``add_special`` adds BOS or EOS as the
        tokenizer's post-processor says.

        Takes time proportional to the text (about a second for 2 MB) with the interpreter lock released: limit the
        text first (``fewest_tokens`` helps) and call it from a thread when it is long. Raises InvalidRequest for text
        that is not valid Unicode.
        """
        try:
            # The only entry point of the library that releases the interpreter lock.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
        except TypeError as error:
            raise InvalidRequest("text: is not valid Unicode (it holds a lone surrogate)", field="text") from error
        return encoding.ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids without special tokens. Ids outside the vocabulary have no text; bytes that are no
        character become U+FFFD."""
        size = self.vocab_size
        return self._backend.decode([token_id for token_id in token_ids if 0 <= token_id < size])

    def piece(self, token_id: int) -> Piece:
        """What the token stands for, special tokens too; empty for an id outside the vocabulary."""
        piece = self._cache.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            piece = b"" if token is None else self.pieces.parse(token)
            if token is not None:
                self._cache[token_id] = piece
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; empty for an id outside the vocabulary."""
        return _as_bytes(self.piece(token_id))

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text as the vocabulary writes it (say, "<|im_end|>"), None if there is none."""
        return self._backend.token_to_id(token)

    def fewest_tokens(self, text_bytes: int) -> int:
        """A lower bound for the tokens of a text of ``text_bytes`` UTF-8 bytes, without encoding it.

        Holds for text of which normalisation drops nothing.
        """
        return -(-text_bytes // self.longest_token_bytes)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Load the tokenizer of a model directory.

    Raises TokenizerMissing when it has no tokenizer.json (such a model takes token ids only) and ModelError when a
    file is corrupt or of an unsupported kind.
    """
    path = directory / "tokenizer.json"
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TokenizerMissing(
            f"model {directory.name}: has no tokenizer.json; send prompt_token_ids instead of text"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    backend = _parse(path, content)
    backend.no_truncation()
    backend.no_padding()
    texts = special_token_texts(directory)
    special_ids = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    eos_ids = eos_token_ids(directory)
    if not eos_ids and (eos_id := backend.token_to_id(texts.get("eos_token", ""))) is not None:
        eos_ids = (eos_id,)
    return Tokenizer(
        backend,
        parse_decoder(_decoder(backend)),
        special_ids=frozenset(special_ids),
        eos_ids=eos_ids,
        bos_id=backend.token_to_id(texts.get("bos_token", "")),
    )


def _decoder(backend: tokenizers.Tokenizer) -> object:
    """The ``decoder`` of the tokenizer.json, from the library, as reading the file again would take much memory."""
    return None if backend.decoder is None else json.loads(backend.decoder.__getstate__())


def _as_bytes(piece: Piece) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode()


def _parse(path: Path, content: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # bare Exception is what the library raises for every fault in the file
        raise ModelError(f"{path}: is no valid tokenizer: {error}") from error
