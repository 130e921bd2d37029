"""Placeholders in prompts: one for each picture becomes as many as it has embeddings, and what stands between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from jaxpage.pictures.border import Picture


def expand_placeholders(
    token_ids: list[int],
    pictures: Sequence[Picture],
    ids: Mapping[str, int],
    tokens_of: Callable[[Picture], list[int]] | None = None,
) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """The prompt with all placeholders, and (first token, number of tokens) of each picture.

    `ids`: the placeholder of each kind. `tokens_of`: all tokens of a picture, of which the first is a placeholder; by
    default each is one. The pictures of one kind come in the order of the prompt, which has one placeholder for each
    picture, or already all of them. Raises ValueError if the numbers do not match.
    """
    for picture in pictures:
        if picture.kind not in ids:
            raise ValueError(f"the model takes no {picture.kind}s, only {', '.join(ids)}s")
    once = {kind: has_one_each(token_ids, pictures, kind, ids[kind]) for kind in ids}
    kinds = {token_id: kind for kind, token_id in ids.items()}
    waiting = {kind: [i for i, p in enumerate(pictures) if p.kind == kind] for kind in ids}
    spans: list[tuple[int, int]] = [(0, 0)] * len(pictures)
    expanded: list[int] = []
    index = 0
    while index < len(token_ids):
        token_id = token_ids[index]
        kind = kinds.get(token_id)
        if kind is None:
            expanded.append(token_id)
            index += 1
            continue
        which = waiting[kind].pop(0)
        picture = pictures[which]
        whole = tokens_of(picture) if tokens_of else [token_id] * picture.num_tokens
        is_there = token_ids[index : index + len(whole)] == whole
        if not once[kind] and not is_there:
            with_ends = " with the ends of its rows" if tokens_of else ""
            raise ValueError(
                f"{kind} {which} has {picture.num_embeddings} embeddings, but fewer placeholders (token {token_id}) "
                f"stand together{with_ends} from token {index} of the prompt on; give one placeholder for each {kind}"
            )
        spans[which] = (len(expanded), len(whole))
        expanded += whole
        # A picture of one embedding may have all its tokens although each has one placeholder.
        is_whole = is_there and (not once[kind] or picture.num_embeddings == 1)
        index += len(whole) if is_whole else 1
    return expanded, tuple(spans)


def has_one_each(
    token_ids: list[int], pictures: Sequence[Picture], kind: str, token_id: int
) -> bool:
    """Whether the prompt has one placeholder for each picture of a kind, and not all.

    Raises ValueError if it has neither.
    """
    found = token_ids.count(token_id)
    lengths = [picture.num_embeddings for picture in pictures if picture.kind == kind]
    if found == len(lengths):
        return True
    if found == sum(lengths):
        return False
    raise ValueError(
        f"the prompt has {found} placeholders for {kind}s (token {token_id}), but there are {len(lengths)} {kind}s; "
        f"give one placeholder for each, or one for each of their {sum(lengths)} embeddings"
    )
