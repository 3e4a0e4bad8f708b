"""Images of requests: what a step encodes, what the encoder cache keeps, as vLLM does it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from emu.config.schema import VllmTable
from emu.features.images.encoding import EncoderCache, ImageWork
from emu.request import Prefix, Request
from emu.scheduling.base import ReplicaLimits
from emu.scheduling.vllm import VllmScheduler


def request(number, images=(), prompt=100, output=3, ids=None):
    made = Request(
        request_id=number,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        max_output_tokens=output,
        prefix=None if ids is None else Prefix(np.array(ids, dtype=np.int64)),
    )
    made.images = tuple(images)
    return made


def scheduler(budget=64, cache=64, blocks=1000, caching=False, ahead=False, **keys):
    limits = ReplicaLimits(
        num_blocks=blocks, block_size=16, max_model_tokens=10_000, prefix_caching=caching
    )
    table = VllmTable(**keys)
    limits.forms_ahead = ahead
    return VllmScheduler(table, limits, parts=[EncoderCache(budget, cache)])


def images_of(batch):
    return [
        n for work in batch.shape.works if isinstance(work, ImageWork) for n in work.image_tokens
    ]


def drive(engine, requests):
    """(new tokens of prompts, images encoded) of each step."""
    for one in requests:
        engine.enqueue(one, 0)
    now_ns, steps = 0, []
    while (batch := engine.schedule(now_ns)) is not None:
        steps.append(([chunk.new_tokens for chunk in batch.chunks], images_of(batch)))
        now_ns += 1
        assert engine.recount() == []
        engine.complete(batch, 1, now_ns, 1)
        assert engine.recount() == []
    return steps


def test_an_image_is_encoded_whole_in_the_step_that_reaches_it():
    engine = scheduler(max_num_batched_tokens=40)
    steps = drive(engine, [request(1, [(7, 30, 20), (8, 60, 10)])])
    assert steps[:3] == [([40], [20]), ([40], [10]), ([20], [])]


def test_a_chunk_ends_before_an_image_that_the_step_has_no_budget_for():
    engine = scheduler(budget=30, max_num_batched_tokens=200)
    steps = drive(engine, [request(1, [(7, 5, 20), (8, 60, 20)])])
    assert steps[:2] == [([60], [20]), ([40], [20])]


def test_a_request_waits_until_the_cache_has_room():
    """The first image is held until all of its tokens were computed, three steps later."""
    engine = scheduler(budget=30, cache=30, max_num_batched_tokens=10)
    first, second = request(1, [(7, 0, 25)], prompt=28), request(2, [(8, 0, 10)], prompt=12)
    steps = drive(engine, [first, second])
    assert [images for _, images in steps[:4]] == [[25], [], [], [10]]


def test_an_image_is_encoded_once_for_all_who_have_it_while_it_is_kept():
    engine = scheduler(cache=50, max_num_batched_tokens=300)
    images = [(7, 0, 20), (7, 40, 20)]
    steps = drive(engine, [request(1, images), request(2, images)])
    assert [images for _, images in steps if images] == [[20]]
    assert (engine.parts[0].encoded_images, engine.parts[0].hits) == (1, 3)
    drive(engine, [request(3, [(8, 0, 40)])])  # the kept image has to go
    drive(engine, [request(4, [(7, 0, 20)])])
    assert (engine.parts[0].encoded_images, engine.parts[0].encoded_tokens) == (3, 80)


def test_the_image_that_lost_its_last_user_first_gives_its_room():
    engine = scheduler(budget=60, cache=60, max_num_batched_tokens=300)
    for image in (7, 8, 7):  # the last one takes 7 into use again, and gives it up after 8
        drive(engine, [request(image, [(image, 0, 20)])])
    drive(engine, [request(1, [(9, 0, 30)])])
    hits = engine.parts[0].hits
    drive(engine, [request(2, [(7, 0, 20)])])
    assert engine.parts[0].hits == hits + 1
    drive(engine, [request(3, [(8, 0, 20)])])
    assert engine.parts[0].hits == hits + 1


def test_blocks_of_other_images_are_not_shared():
    engine = scheduler(caching=True, max_num_seqs=1, max_num_batched_tokens=300)
    ids = list(range(1, 110))
    requests = [request(n, [(image, 32, 20)], ids=ids) for n, image in enumerate((7, 8, 7))]
    steps = drive(engine, requests)
    assert [one.prefix_hit_tokens for one in requests] == [0, 32, 96]
    assert [images for _, images in steps if images] == [[20], [20]]


def test_an_image_larger_than_the_budget_is_refused():
    assert scheduler(budget=30).can_ever_hold(request(1, [(7, 0, 31)])) == (
        "has an image of 31 tokens, more than 30"
    )


@pytest.mark.parametrize("seed", range(12))
def test_books_hold_in_crowded_random_worlds(seed):
    rng = random.Random(seed)
    engine = scheduler(
        budget=rng.choice((20, 40)),
        cache=rng.choice((20, 50)),
        blocks=rng.choice((16, 40)),
        caching=rng.random() < 0.5,
        ahead=rng.random() < 0.5,
        max_num_seqs=6,
        max_num_batched_tokens=rng.choice((24, 64)),
    )
    requests = []
    for number in range(30):
        images, at = [], 0
        for _ in range(rng.randint(0, 3)):
            image = rng.randrange(6)
            images.append((image, at + rng.randint(0, 9), 5 + 3 * image))
            at = images[-1][1] + images[-1][2]
        prompt = at + rng.randint(1, 60)
        ids = None if rng.random() < 0.5 else list(range(prompt + 20))
        requests.append(request(number, images, prompt, rng.randint(1, 20), ids))
    drive(engine, requests)
    assert all(one.generated_tokens == one.output_tokens for one in requests)
    assert engine.blocks_used == 0
    assert not engine.parts[0]._held


def test_one_that_can_never_be_held_gives_its_images_up():
    engine = scheduler(blocks=4)
    big, small = request(1, images=[(7, 0, 20)], prompt=90), request(2, prompt=20)
    engine.enqueue(big, 0)
    engine.enqueue(small, 0)
    assert [one for one, _ in engine.drop_unschedulable(0)] == [big]
    assert engine.recount() == []
