"""Prefix hits, admission, growth and freeing over all groups."""

import pytest

from tests.core.harness import core_request, full, kv_config, sliding
from vllm_clone.config.kv_cache import KVCacheSpec
from vllm_clone.core.kv_cache.hashing import make_hasher
from vllm_clone.core.kv_cache.manager import KVCacheManager
from vllm_clone.core.request import BlockHasher, Request

HASHER = BlockHasher(4, *make_hasher("xxhash"))


def manager(*specs: KVCacheSpec, num_blocks: int = 50, watermark: float = 0.0, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(kv_config(num_blocks, *(specs or (full(),))), 256, caching, 64, watermark)


def request(request_id: str, prompt: list[int] | int, **options: object) -> Request:
    return Request(core_request(request_id, prompt, **options), HASHER)  # type: ignore[arg-type]


def admit(kv: KVCacheManager, new: Request, count: int | None = None, **options: bool) -> int:
    """Admit with the prefix hit; how many tokens were cached."""
    hit = kv.find_prefix(new)
    count = new.num_tokens - hit.num_tokens if count is None else count
    blocks = kv.admit(new, count, hit, **{"reserve_full": False, "keep_watermark": False} | options)
    assert blocks is not None
    new.num_computed_tokens = hit.num_tokens + count
    return hit.num_tokens


@pytest.mark.parametrize(("prompt", "hit"), [(12, 8), (13, 12), (16, 12), (3, 0), (4, 0), (5, 4), (1, 0)])
def test_at_least_one_token_is_computed_and_hits_are_whole_blocks(prompt: int, hit: int) -> None:
    kv = manager()
    admit(kv, request("a", prompt))
    assert kv.find_prefix(request("b", prompt)).num_tokens == hit


@pytest.mark.parametrize(("salts", "hit"), [(("x", "y"), 0), ((None, "x"), 0), (("x", None), 0), (("x", "x"), 12)])
def test_a_salt_separates_prefixes(salts: tuple[str | None, str | None], hit: int) -> None:
    kv = manager()
    admit(kv, request("a", 13, salt=salts[0]))
    assert kv.find_prefix(request("b", 13, salt=salts[1])).num_tokens == hit


def test_a_request_that_scores_its_prompt_writes_the_cache_but_does_not_read_it() -> None:
    kv = manager()
    assert admit(kv, request("a", 13, prompt_logprobs=1)) == 0
    assert admit(kv, request("b", 13, prompt_logprobs=1)) == 0
    assert admit(kv, request("c", 13)) == 12
    assert admit(kv, request("d", 13, prompt_logprobs=1, skip_reading_prefix_cache=False)) == 12
    assert admit(kv, request("e", 13, skip_reading_prefix_cache=True)) == 0


def test_no_hits_without_prefix_caching() -> None:
    kv = manager(caching=False)
    admit(kv, Request(core_request("a", 13)))
    assert kv.find_prefix(Request(core_request("b", 13))).num_tokens == 0


def test_shared_blocks_are_counted_once_per_table() -> None:
    kv = manager()
    a, b = request("a", 13), request("b", 13)
    admit(kv, a)
    admit(kv, b)
    assert [block.ref_count for block in kv.groups[0].tables["a"]] == [2, 2, 2, 1]
    assert kv.pool.num_free == 49 - 5
    kv.free(a)
    kv.free(b)
    assert kv.pool.num_free == 49


def test_touched_free_blocks_count_as_taken() -> None:
    kv = manager(num_blocks=5)
    a = request("a", 13)
    admit(kv, a)
    kv.free(a)
    hungry = request("b", [*range(100, 112), 1, 2, 3, 4, 5])
    hit = kv.find_prefix(hungry)
    assert hit.num_tokens == 12
    assert kv.admit(hungry, 5, hit, reserve_full=False, keep_watermark=False) is None
    assert kv.admit(hungry, 4, hit, reserve_full=False, keep_watermark=False) == ([1, 2, 3, 4],)


def test_a_failed_admission_changes_nothing() -> None:
    kv = manager(full(), sliding(6), num_blocks=8)
    a = request("a", 9)
    admit(kv, a)
    before = kv.pool.free_list.ids()
    b = request("b", 13)
    hit = kv.find_prefix(b)
    assert kv.admit(b, 5, hit, reserve_full=False, keep_watermark=False) is None
    assert kv.pool.free_list.ids() == before
    assert "b" not in kv.groups[0].tables


def test_the_whole_sequence_must_fit_when_it_is_reserved() -> None:
    kv = manager(num_blocks=5)
    long = request("a", 20)
    hit = kv.find_prefix(long)
    assert kv.admit(long, 4, hit, reserve_full=True, keep_watermark=False) is None
    assert kv.admit(long, 4, hit, reserve_full=False, keep_watermark=False) == ([1],)


def test_reserving_counts_a_sliding_window_by_what_it_recycles() -> None:
    kv = manager(sliding(9), num_blocks=1 + 19)  # cdiv(8 + 64, 4) + 1 blocks at most
    endless = request("a", 200)
    assert kv.admit(endless, 64, kv.find_prefix(endless), reserve_full=True, keep_watermark=False) is not None


def test_the_watermark_keeps_blocks_free() -> None:
    kv = manager(num_blocks=20, watermark=0.25)
    big = request("a", 60)  # 15 of 19 blocks, 5 must stay free
    hit = kv.find_prefix(big)
    assert kv.admit(big, 60, hit, reserve_full=False, keep_watermark=True) is None
    assert kv.admit(big, 60, hit, reserve_full=False, keep_watermark=False) is not None


def test_growth_gives_a_block_when_one_is_full_and_indexes_it_when_it_is_filled() -> None:
    kv = manager()
    grower = request("a", 3)
    admit(kv, grower)
    news = []
    for token in range(6):
        grower.append_token(token)
        news.append(kv.grow(grower, 1))
        grower.num_computed_tokens += 1
    assert news == [(), ([2],), (), (), (), ([3],)]
    same = request("b", grower.all_token_ids)
    assert kv.find_prefix(same).num_tokens == 8


def test_a_block_can_be_shared_from_the_step_that_fills_it() -> None:
    kv = manager()
    grower = request("a", 7)
    admit(kv, grower)
    grower.append_token(1)
    assert kv.grow(grower, 1) == ()
    assert kv.find_prefix(request("b", [*grower.all_token_ids, 5])).num_tokens == 8


def test_growth_fails_without_free_blocks() -> None:
    kv = manager(num_blocks=3)
    grower = request("a", 8)
    admit(kv, grower)
    grower.append_token(1)
    assert kv.grow(grower, 1) is None


def test_growth_frees_what_fell_out_of_the_window_as_soon_as_it_did() -> None:
    kv = manager(sliding(6))
    grower = request("a", 8)
    admit(kv, grower)
    live = []
    for _ in range(8):
        grower.append_token(1)
        assert kv.grow(grower, 1) is not None
        live.append([b.block_id for b in kv.groups[0].tables["a"]])
        grower.num_computed_tokens += 1
    # token 8 sees 3 … 8, token 9 sees 4 … 9 and no longer block 0
    assert [len([b for b in table if b]) for table in live] == [3, 2, 2, 2, 3, 2, 2, 2]
    assert live[-1][:2] == [0, 0], "the null block takes their place"


def test_groups_agree_on_one_hit() -> None:
    kv = manager(full(), sliding(6))
    shared = list(range(16))
    first = request("a", [*shared, *range(50, 70)])
    admit(kv, first)
    kv.free(first)
    # the sliding group kept only the window before the end of the first prompt
    second = request("b", [*shared, *range(80, 90)])
    hit = kv.find_prefix(second)
    assert (hit.num_tokens, hit.longest) == (0, 16)
    admit(kv, second)
    kv.free(second)
    # the second request kept the window before the junction
    assert kv.find_prefix(request("c", [*shared, *range(95, 99)])).num_tokens == 16


def test_the_next_turn_of_a_hybrid_model_starts_where_the_last_one_ended() -> None:
    kv = manager(full(), sliding(6))
    turn = request("a", 10)
    admit(kv, turn)
    for token in range(15):
        turn.append_token(token)
        assert kv.grow(turn, 1) is not None
        turn.num_computed_tokens += 1
    kv.free(turn)
    assert kv.find_prefix(request("b", [*turn.all_token_ids, 1, 2, 3])).num_tokens == 24


def test_blocks_a_request_was_given_but_never_wrote_are_not_found() -> None:
    kv = manager()
    victim = request("a", 20)
    admit(kv, victim, 8)
    assert kv.grow(victim, 12) is not None  # scheduled in a step, then preempted in the same step
    kv.free(victim)
    assert kv.find_prefix(request("b", 20)).num_tokens == 8


@pytest.mark.parametrize(
    ("specs", "tokens", "blocks"),
    [((full(),), 17, 5), ((full(), full()), 17, 10), ((full(), sliding(5)), 200, 50 + 18)],
)
def test_the_most_blocks_a_request_ever_holds(specs: tuple[KVCacheSpec, ...], tokens: int, blocks: int) -> None:
    assert manager(*specs).max_blocks(tokens) == blocks


def test_reset_waits_for_the_last_request() -> None:
    kv = manager()
    a = request("a", 13)
    admit(kv, a)
    assert not kv.reset_prefix_cache()
    kv.free(a)
    assert kv.reset_prefix_cache()
    assert kv.find_prefix(request("b", 13)).num_tokens == 0
