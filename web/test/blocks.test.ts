import { describe, expect, it } from 'vitest';
import { blockEnd, BlockFeed, type BlockOp } from '../src/chat/blocks';

/** The settled blocks of a text fed in pieces of `size`, code without its last fence, thoughts as brackets. */
function blocks(text: string, size = text.length): string[] {
  const feed = new BlockFeed();
  const ops: BlockOp[] = [];
  for (let at = 0; at < text.length; at += Math.max(size, 1)) ops.push(...feed.feed(text.slice(at, at + size)));
  ops.push(...feed.end());
  const found: string[] = [];
  for (const op of ops) {
    if (op.op === 'think-start') found.push('<');
    else if (op.op === 'think-end') found.push('>');
    else if (op.op === 'settle' && op.joins) found.push((found.pop() ?? '') + op.source);
    else if (op.op === 'settle') found.push(op.source);
  }
  return found.map((block) => block.trim());
}

const TEXT = `Intro line
goes on.

- one
- two

- three after a blank line

  with a paragraph of its own

1. first

2. second

\`\`\`python
def f():

    return 1
\`\`\`
After the fence.

> quoted

| a | b |
|---|---|
| 1 | 2 |

Last.`;

describe('blocks', () => {
  it('are cut at blank lines that cannot belong to what came before', () => {
    expect(blocks(TEXT)).toEqual([
      'Intro line\ngoes on.',
      '- one\n- two\n\n- three after a blank line\n\n  with a paragraph of its own\n\n1. first\n\n2. second',
      '```python\ndef f():\n\n    return 1',
      'After the fence.',
      '> quoted',
      '| a | b |\n|---|---|\n| 1 | 2 |',
      'Last.',
    ]);
  });

  it('are the same however the text is cut', () => {
    const whole = blocks(TEXT);
    for (const size of [1, 2, 3, 5, 7, 11, 64]) expect(blocks(TEXT, size), `pieces of ${size}`).toEqual(whole);
  });

  it('lose nothing: joined, they are the text, but for the fences that close code', () => {
    const text = `${TEXT}\n\n\n${TEXT}`;
    const bare = text.replaceAll('return 1\n```', 'return 1');
    for (const size of [1, 9, text.length]) expect(blocks(text, size).join('').replace(/\s+/g, '')).toBe(bare.replace(/\s+/g, ''));
  });

  it('end a paragraph where a list begins right under it', () => {
    expect(blocks('Points:\n- one\n- two', 1)).toEqual(['Points:', '- one\n- two']);
    expect(blocks('In the year\n1984. And so on', 1)).toEqual(['In the year\n1984. And so on']);
  });

  it('wait for the end of a fence', () => {
    expect(blockEnd('```\ncode\n\nmore code\n\nstill')).toBe(0);
    expect(blockEnd('```\ncode\n```\n')).toBe('```\ncode\n```\n'.length);
    expect(blockEnd('````\n```\n\ntext\n')).toBe(0);
  });

  it('wait until a line says whether it goes on with a list', () => {
    expect(blockEnd('- one\n\n-')).toBe(0);
    expect(blockEnd('- one\n\n- tw')).toBe(0);
    expect(blockEnd('- one\n\ntext')).toBe(7);
  });

  it('show every character once, and hold back nothing but a mark that may come', () => {
    const feed = new BlockFeed();
    let shown = '';
    for (const char of 'plain text with < and <b but no mark') {
      for (const op of feed.feed(char)) if (op.op === 'append') shown += op.text;
    }
    expect(shown).toBe('plain text with < and <b but no mark');
  });
});

describe('thoughts', () => {
  it('are a part of their own, however they are cut', () => {
    const text = '<think>\nFirst.\n\nSecond.\n</think>\n\nThe answer.';
    for (const size of [1, 2, 3, 4, 8, 100]) {
      expect(blocks(text, size), `pieces of ${size}`).toEqual(['<', 'First.', 'Second.', '>', 'The answer.']);
    }
  });

  it('end with the text when their end is missing', () => {
    expect(blocks('<think>on and on', 3)).toEqual(['<', 'on and on', '>']);
  });

  it('are recognised at the start of a block only', () => {
    expect(blocks('Write <think> and </think> around it.', 2)).toEqual(['Write <think> and </think> around it.']);
  });
});
