// @vitest-environment jsdom
import { beforeEach, describe, expect, it, vi } from 'vitest';
import { CONSOLE_LIMIT, Live, mergeConsole } from '../src/api/live.svelte';
import type { Call, ConsoleEvent } from '../src/api/types';

function call(id: string, more: Partial<Call> = {}): Call {
  return { id, model: 'm', phase: 'generating', stages: [], output_tokens: 0, accepted_ms: 1, ...more };
}

function line(seq: number, text = `line ${seq}`): ConsoleEvent {
  return { seq, ms: seq, event: 'proxy progress', line: text };
}

function tell(live: Live, event: string, value: unknown, id = ''): void {
  live.take({ event, data: JSON.stringify(value), id });
}

// Without a budget of time: how much of a burst fits into it is the machine's affair.
describe('the live state', () => {
  beforeEach(() => {
    vi.stubGlobal('requestAnimationFrame', () => 0);
  });

  it('starts from a snapshot and follows the changes', () => {
    const live = new Live();
    tell(live, 'snapshot', { calls: [call('a')], nodes: [], models: [], console: [line(1)] });
    tell(live, 'upsert', { kind: 'call', value: call('b') });
    tell(live, 'upsert', { kind: 'call', value: call('a', { output_tokens: 5 }) });
    tell(live, 'upsert', { kind: 'console', value: line(2) });
    live.flush(Infinity);
    expect(live.calls.get('a')?.output_tokens).toBe(5);
    expect([...live.calls.keys()]).toEqual(['a', 'b']);
    expect(live.console.map(({ seq }) => seq)).toEqual([1, 2]);
    tell(live, 'remove', { kind: 'call', id: 'a' });
    live.flush(Infinity);
    expect([...live.calls.keys()]).toEqual(['b']);
  });

  it('forgets what a new snapshot no longer has, and changes from before it', () => {
    const live = new Live();
    tell(live, 'snapshot', { calls: [call('a'), call('b')], nodes: [], models: [], console: [line(1)] });
    live.flush(Infinity);
    tell(live, 'upsert', { kind: 'call', value: call('late') });
    tell(live, 'snapshot', { calls: [call('b')], nodes: [], models: [], console: [] });
    live.flush(Infinity);
    expect([...live.calls.keys()]).toEqual(['b']);
    expect(live.console).toEqual([]);
  });

  it('draws a burst over several frames and keeps only the last state of each thing', () => {
    const live = new Live();
    for (let round = 1; round <= 3; round++) {
      for (let n = 0; n < 100; n++) tell(live, 'upsert', { kind: 'call', value: call(`c${n}`, { output_tokens: round }) });
    }
    live.flush(0);
    expect(live.calls.size).toBeLessThan(50);
    for (let frame = 0; frame < 50; frame++) live.flush(0);
    expect(live.calls.size).toBe(100);
    expect([...live.calls.values()].every((item) => item.output_tokens === 3)).toBe(true);
  });

  it('lists calls in flight, the oldest first, and ended ones; the list is another only when it must be', () => {
    const live = new Live();
    const early = call('early', { accepted_ms: 1, tokens_per_second: 2 });
    tell(live, 'snapshot', { calls: [call('late', { accepted_ms: 9 }), early], nodes: [], models: [], console: [] });
    live.flush(Infinity);
    const flying = live.flying;
    const over = live.over;
    expect([flying, over, live.rate]).toEqual([['early', 'late'], [], 2]);
    tell(live, 'upsert', { kind: 'call', value: { ...early, output_tokens: 3, tokens_per_second: 4 } });
    live.flush(Infinity);
    expect(live.flying).toBe(flying);
    expect(live.over).toBe(over);
    expect(live.rate).toBe(4);
    tell(live, 'upsert', { kind: 'call', value: { ...early, phase: 'complete', ended_ms: 5 } });
    live.flush(Infinity);
    expect(live.flying).toEqual(['late']);
    expect(live.over.map(({ id }) => id)).toEqual(['early']);
    expect(live.rate).toBe(0);
    tell(live, 'remove', { kind: 'call', id: 'early' });
    live.flush(Infinity);
    expect(live.over).toEqual([]);
  });

  it('bounds the calls it keeps, those in flight last of all', () => {
    const live = new Live();
    tell(live, 'upsert', { kind: 'call', value: call('running', { accepted_ms: 0 }) });
    for (let n = 0; n < 1100; n++) {
      tell(live, 'upsert', { kind: 'call', value: call(`c${n}`, { phase: 'complete', ended_ms: n }) });
    }
    live.flush(Infinity);
    expect(live.calls.size).toBe(1000);
    expect(live.calls.has('running')).toBe(true);
    expect(live.calls.has('c0')).toBe(false);
    expect(live.calls.has('c1099')).toBe(true);
  });
});

describe('the console', () => {
  it('updates entries in place, adds in order and removes', () => {
    const ring = [line(1), line(2), line(4)];
    const merged = mergeConsole(ring, new Map([[2, line(2, 'changed')], [5, line(5)], [3, line(3)]]), new Set([1]));
    expect(merged.map(({ seq }) => seq)).toEqual([2, 3, 4, 5]);
    expect(merged[0]?.line).toBe('changed');
  });

  it('is bounded', () => {
    const ring = Array.from({ length: CONSOLE_LIMIT }, (_, index) => line(index));
    const merged = mergeConsole(ring, new Map([[CONSOLE_LIMIT, line(CONSOLE_LIMIT)]]));
    expect(merged).toHaveLength(CONSOLE_LIMIT);
    expect(merged[0]?.seq).toBe(1);
  });
});
