// @vitest-environment jsdom
import { describe, expect, it } from 'vitest';
import { AnswerView } from '../src/chat/answer-view';
import { BlockFeed, type BlockOp } from '../src/chat/blocks';
import { renderMarkdown } from '../src/chat/markdown';

const WORDS = 'The mesh keeps one **sequence on** every `node that` takes part, so a *token* travels. And $a_1$ then [it](https://x.org) goes.';

function repeated(count: number, line: (number: number) => string): string {
  return Array.from({ length: count }, (_, number) => line(number)).join('');
}

const LONG: Record<string, string> = {
  'a paragraph': repeated(60, (number) => `${WORDS} Sentence ${number} ends. `),
  'a paragraph of lines': repeated(60, (number) => `${WORDS}\nLine ${number}, then\n`),
  'a list': repeated(90, (number) => `- ${WORDS} ${number}\n`),
  'a list with lists in it': repeated(60, (number) => `- item ${number}\n  - ${WORDS}\n  - more\n`),
  'a loose list': repeated(60, (number) => `${number + 1}. ${WORDS}\n\n`),
  'a list with code in it': repeated(40, (number) => `- item ${number}\n\n  \`\`\`\n- no item\n\n  code\n  \`\`\`\n`),
  'a table': `| a | b |\n|---|--:|\n${repeated(75, (number) => `| ${WORDS} | ${number} |\n`)}`,
  'a table without borders': `a | b\n---|--:\n${repeated(75, (number) => `${WORDS} | ${number}\n`)}`,
  code: `\`\`\`\n${repeated(200, (number) => `  line ${number} = \"x\"\n\n`)}\`\`\`\n`,
  'code without an end': `~~~\n${repeated(200, (number) => `  line ${number}\n`)}`,
};

function ops(text: string, size: number): BlockOp[] {
  const feed = new BlockFeed();
  const out: BlockOp[] = [];
  for (let at = 0; at < text.length; at += size) out.push(...feed.feed(text.slice(at, at + size)));
  return [...out, ...feed.end()].filter((op) => op.op !== 'append');
}

/** The page after an answer that came in pieces of `size`, without what is only for the eye or the hand. */
function shown(text: string, size: number): string {
  const root = document.createElement('div');
  document.body.append(root);
  const view = new AnswerView(root, () => undefined);
  view.open();
  for (let at = 0; at < text.length; at += size) view.append(text.slice(at, at + size));
  view.finish();
  root.remove();
  expect(root.querySelectorAll('.tail, .cursor')).toHaveLength(0);
  return bare(root.innerHTML);
}

function bare(html: string): string {
  return html
    .replace(/<div class="md">|<span class="lines">|<\/span>(?=<\/code>|<span class="lines">)|<button.*?<\/button>| aria-label="Code"| role="region"/g, '')
    .replace(/<\/div>(?=$)/, '')
    .replace(/\s+/g, ' ')
    .replace(/> | </g, (edge) => edge.trim());
}

describe('a long block', () => {
  it.each(Object.entries(LONG))('%s is settled in pieces that are not long', (_, text) => {
    const found = ops(text, 7);
    expect(found.length).toBeGreaterThan(1);
    for (const op of found) if (op.op === 'settle') expect(op.source.length).toBeLessThan(2600);
  });

  it.each(Object.entries(LONG))('%s is cut at the same places however it comes', (_, text) => {
    const whole = ops(text, text.length);
    for (const size of [1, 13, 4000]) expect(ops(text, size), `pieces of ${size}`).toEqual(whole);
  });

  it.each(Object.entries(LONG))('%s looks like one rendered as a whole', (_, text) => {
    const whole = document.createElement('div');
    whole.append(renderMarkdown(text));
    expect(shown(text, 50)).toBe(bare(whole.innerHTML));
  });

  it('of very many rows goes on in another table with the same head', () => {
    const root = document.createElement('div');
    const view = new AnswerView(root, () => undefined);
    view.append(`| a | b |\n|---|---|\n${repeated(400, (number) => `| row | ${number} |\n`)}`);
    view.finish();
    expect([...root.querySelectorAll('tbody td:last-child')].map((cell) => cell.textContent)).toEqual(
      Array.from({ length: 400 }, (_, number) => String(number)),
    );
    const heads = [...root.querySelectorAll('thead')].map((head) => head.textContent);
    expect(heads.length).toBeGreaterThan(1);
    expect(new Set(heads)).toEqual(new Set(['ab']));
  });

  it('is not cut where emphasis, a formula or a link is open', () => {
    const open = repeated(30, () => 'Words that go on. ');
    for (const mark of ['**', '*', '__', '~~', '$', '[', '<b>', '\\(']) {
      expect(ops(`Text ${mark}${open.repeat(6)}`, 100), mark).toHaveLength(1);
    }
    expect(ops(`2 * 3 and snake_case and $5 and x > y. ${open.repeat(6)}`, 100).length).toBeGreaterThan(1);
  });
});
