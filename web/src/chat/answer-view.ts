// The DOM of one answer: a text node grows at its end while blocks before it are rendered once and left alone.

import { BlockFeed, type BlockOp } from './blocks';
import { highlight } from './highlight';
import { renderMarkdown } from './markdown';
import type { GoesOn } from './pieces';

/** Milliseconds of a frame that rendering a stored answer may take before it goes on in the next. */
const SLICE_MS = 6;
/** Rows after which a table goes on in another with the same head: each row more lays out all of them anew. */
const ROWS = 80;
/** What in an item is not words. */
const BLOCKS = 'p, div, ul, ol, pre, blockquote, hr, h1, h2, h3, h4, h5, h6';
/** Characters of a stored answer that are cut into blocks at a time. */
const STRIDE = 4000;

export class AnswerView {
  private readonly feed = new BlockFeed();
  private readonly tail = document.createElement('div');
  private readonly text = document.createTextNode('');
  private readonly cursor = document.createElement('span');
  private think: { box: HTMLDetailsElement; body: HTMLElement; label: Text; started: number } | null = null;
  /** The element that the next piece goes on with. */
  private part: { as: GoesOn['kind']; element: Element } | null = null;
  private cancelled = false;

  constructor(
    private readonly root: HTMLElement,
    private readonly copyCode: (text: string, button: HTMLButtonElement) => void,
  ) {
    this.tail.className = 'tail';
    this.cursor.className = 'cursor';
    this.cursor.textContent = '▍';
    this.cursor.setAttribute('aria-hidden', 'true');
    this.tail.append(this.text);
  }

  /** Shows a stored answer, in slices when it is long. */
  async showAll(source: string): Promise<void> {
    let until = performance.now() + SLICE_MS;
    const apply = async (ops: BlockOp[]): Promise<void> => {
      for (const op of ops) {
        if (this.cancelled) return;
        if (op.op === 'append') continue;
        this.apply(op);
        if (performance.now() < until) continue;
        await new Promise((resolve) => requestAnimationFrame(resolve));
        until = performance.now() + SLICE_MS;
      }
    };
    for (let at = 0; at < source.length && !this.cancelled; at += STRIDE) {
      await apply(this.feed.feed(source.slice(at, at + STRIDE)));
    }
    await apply(this.feed.end());
  }

  /** Starts a live answer: the cursor blinks at the end until `finish`. */
  open(): void {
    this.tail.append(this.cursor);
    this.root.append(this.tail);
  }

  append(piece: string): void {
    for (const op of this.feed.feed(piece)) this.apply(op, true);
  }

  finish(): void {
    for (const op of this.feed.end()) this.apply(op);
    this.cursor.remove();
    this.tail.remove();
  }

  cancel(): void {
    this.cancelled = true;
  }

  private apply(op: BlockOp, live = false): void {
    if (op.op === 'append') {
      this.text.appendData(op.text);
    } else if (op.op === 'settle') {
      this.settle(op.source, op.joins, op.goesOn);
    } else if (op.op === 'think-start') {
      this.openThinking(live);
    } else {
      this.closeThinking(live);
    }
  }

  private settle(source: string, joins: boolean, goesOn: GoesOn['kind'] | null): void {
    this.text.data = '';
    const before = this.part;
    let element: Element | null;
    if (joins && before?.as === 'code') {
      element = before.element;
      if (source !== '') this.put(element, lines(source));
    } else if (joins && source.trim() === '') {
      element = null;
    } else {
      const block = this.block(source);
      element = (joins ? this.join(block) : null) ?? this.add(block);
    }
    if (goesOn !== null && element !== null) {
      this.part = { as: goesOn, element };
      if (goesOn === 'text') this.put(element, document.createTextNode(' '));
    } else {
      this.part = null;
    }
    this.placeTail();
    if (before?.as === 'code' && this.part === null) void highlight(before.element as HTMLElement);
  }

  /** What is rendered of a block, put at the end of what the page shows; the element that may go on. */
  private add(block: HTMLElement): Element | null {
    this.put(this.think?.body ?? this.root, block);
    return block.lastElementChild === null ? null : growing(block.lastElementChild);
  }

  /** Moves what is rendered into the element that it goes on with; null when there is more, or something else. */
  private join(block: HTMLElement): Element | null {
    const first = block.firstElementChild;
    const from = first === null ? null : growing(first);
    const into = this.part?.element;
    if (first === null || from === null || into?.tagName !== from.tagName) return null;
    if (into.tagName === 'TBODY' && into.childElementCount >= ROWS) return null;
    if (into.querySelector(':scope > li > p') !== null) for (const item of from.children) loosen(item);
    for (const child of [...from.childNodes]) this.put(into, child);
    first.remove();
    return block.childElementCount === 0 ? into : null;
  }

  /** At the end of `parent`, before the open end where that stands there. */
  private put(parent: Element, child: Node): void {
    parent.insertBefore(child, this.tail.parentNode === parent ? this.tail : null);
  }

  /** The open end of a text or of code stands in it; that of anything else, below. */
  private placeTail(): void {
    if (!this.tail.isConnected) return;
    const within = this.part?.as === 'text' || this.part?.as === 'code' ? this.part.element : null;
    const parent = within ?? this.think?.body ?? this.root;
    this.tail.classList.toggle('within', within !== null);
    if (this.tail.parentNode !== parent) parent.append(this.tail);
  }

  private block(source: string): HTMLElement {
    const block = document.createElement('div');
    block.className = 'md';
    block.append(renderMarkdown(source));
    for (const code of block.querySelectorAll<HTMLElement>('.code code')) this.dress(code);
    return block;
  }

  private dress(code: HTMLElement): void {
    const button = document.createElement('button');
    button.type = 'button';
    button.className = 'small quiet';
    button.textContent = 'Copy';
    button.addEventListener('click', () => {
      const text = code.textContent ?? '';
      this.copyCode((code.contains(this.cursor) ? text.slice(0, -1) : text).replace(/\n$/, ''), button);
    });
    code.closest('.code')?.querySelector('.code-head')?.append(button);
    code.parentElement?.setAttribute('aria-label', 'Code');
    code.parentElement?.setAttribute('role', 'region');
    // One that grows is coloured when it is whole.
    if (code.textContent !== '') void highlight(code);
  }

  private openThinking(live: boolean): void {
    const box = document.createElement('details');
    box.className = 'think';
    const summary = document.createElement('summary');
    const label = document.createTextNode(live ? 'Thinking…' : 'Thoughts');
    summary.append(label);
    const body = document.createElement('div');
    body.className = 'think-body';
    box.append(summary, body);
    if (this.tail.parentNode === this.root) this.root.insertBefore(box, this.tail);
    else this.root.append(box);
    if (live) {
      // The box is folded: its text grows inside, the cursor stays in sight below it.
      body.append(this.tail);
      this.root.append(this.cursor);
    }
    this.think = { box, body, label, started: performance.now() };
  }

  private closeThinking(live: boolean): void {
    if (this.think === null) return;
    const seconds = (performance.now() - this.think.started) / 1000;
    this.think.label.data = live ? `Thought for ${seconds.toFixed(1)} s` : 'Thoughts';
    if (this.tail.parentNode === this.think.body) {
      this.root.append(this.tail);
      this.tail.append(this.cursor);
    }
    this.think = null;
  }
}

/** Gives an item the paragraph that it would have had beside the others of its list. */
function loosen(item: Element): void {
  const words = document.createElement('p');
  while (item.firstChild !== null && !(item.firstChild instanceof Element && item.firstChild.matches(BLOCKS))) {
    words.append(item.firstChild);
  }
  if (words.textContent?.trim() !== '') item.prepend(words);
}

/** Lines of code in a box of their own, so that those after them do not lay them out anew. */
function lines(source: string): HTMLElement {
  const box = document.createElement('span');
  box.className = 'lines';
  box.textContent = source;
  return box;
}

/** Where the next piece of a rendered element goes. */
function growing(element: Element): Element {
  return element.querySelector(':scope > table > tbody, :scope > pre > code') ?? element;
}
