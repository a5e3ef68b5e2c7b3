// The DOM of one answer: a text node grows at its end while blocks before it are rendered once and left alone.

import { BlockFeed, type BlockOp } from './blocks';
import { highlight } from './highlight';
import { renderMarkdown } from './markdown';

/** Milliseconds of a frame that rendering a stored answer may take before it goes on in the next. */
const SLICE_MS = 8;

export class AnswerView {
  private readonly feed = new BlockFeed();
  private readonly tail = document.createElement('div');
  private readonly text = document.createTextNode('');
  private readonly cursor = document.createElement('span');
  private think: { box: HTMLDetailsElement; body: HTMLElement; label: Text; started: number } | null = null;
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
    const ops = [...this.feed.feed(source).filter((op) => op.op !== 'append'), ...this.feed.end()];
    let until = performance.now() + SLICE_MS;
    for (const op of ops) {
      if (this.cancelled) return;
      this.apply(op);
      if (performance.now() > until) {
        await new Promise((resolve) => requestAnimationFrame(resolve));
        until = performance.now() + SLICE_MS;
      }
    }
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
      if (this.text.length === op.text.length) this.tail.classList.toggle('fence', /^(```|~~~)/.test(op.text));
    } else if (op.op === 'settle') {
      this.text.data = '';
      this.tail.classList.remove('fence');
      const block = this.block(op.source);
      const parent = this.think?.body ?? this.root;
      if (this.tail.parentNode === parent) parent.insertBefore(block, this.tail);
      else parent.append(block);
    } else if (op.op === 'think-start') {
      this.openThinking(live);
    } else {
      this.closeThinking(live);
    }
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
    const source = code.textContent ?? '';
    button.addEventListener('click', () => this.copyCode(source, button));
    code.closest('.code')?.querySelector('.code-head')?.append(button);
    code.parentElement?.setAttribute('aria-label', 'Code');
    code.parentElement?.setAttribute('role', 'region');
    void highlight(code);
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
