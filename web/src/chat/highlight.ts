// Colours in code blocks: a worker finds them, the page takes them over in slices.

import type { Coloured, Job } from './highlight.worker';

/** Longer blocks stay plain: thousands of coloured words make every later layout slow. */
const LIMIT = 20_000;
/** Coloured words that are put on the page in one frame. */
const PER_FRAME = 150;

let worker: Worker | null = null;
let jobs = 0;
const waiting = new Map<number, (html: string) => void>();

export async function highlight(code: HTMLElement): Promise<void> {
  const language = (code.dataset.language ?? '').toLowerCase();
  const source = sourceOf(code);
  if (language === '' || source.length > LIMIT) return;
  const html = await coloured(language, source);
  if (html === '' || sourceOf(code) !== source) return;
  const template = document.createElement('template');
  template.innerHTML = html;
  const text = document.createTextNode(source);
  code.replaceChildren(text);
  while (template.content.firstChild !== null) {
    const slice = document.createDocumentFragment();
    for (let left = PER_FRAME; left > 0 && template.content.firstChild !== null; left--) {
      slice.append(template.content.firstChild);
    }
    text.deleteData(0, slice.textContent?.length ?? 0);
    code.insertBefore(slice, text);
    if (text.length > 0) await new Promise((resolve) => requestAnimationFrame(resolve));
  }
  text.remove();
}

/** Without the newline at its end. */
function sourceOf(code: HTMLElement): string {
  return (code.textContent ?? '').replace(/\n$/, '');
}

function coloured(language: string, source: string): Promise<string> {
  worker ??= started();
  const job: Job = { id: (jobs += 1), language, source };
  return new Promise((resolve) => {
    waiting.set(job.id, resolve);
    worker?.postMessage(job);
  });
}

function started(): Worker {
  const made = new Worker(new URL('./highlight.worker.ts', import.meta.url), { type: 'module' });
  made.addEventListener('message', ({ data }: MessageEvent<Coloured>) => {
    waiting.get(data.id)?.(data.html);
    waiting.delete(data.id);
  });
  // Without it, code stays plain.
  made.addEventListener('error', () => {
    for (const resolve of waiting.values()) resolve('');
    waiting.clear();
  });
  return made;
}
