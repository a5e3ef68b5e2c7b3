// The highlighter, off the page's main thread. The core and each language are loaded when a block first asks.

import type { HLJSApi, LanguageFn } from 'highlight.js';

type Loader = () => Promise<{ default: LanguageFn }>;

const loaders: Record<string, Loader> = {
  bash: () => import('highlight.js/lib/languages/bash'),
  c: () => import('highlight.js/lib/languages/c'),
  cpp: () => import('highlight.js/lib/languages/cpp'),
  css: () => import('highlight.js/lib/languages/css'),
  diff: () => import('highlight.js/lib/languages/diff'),
  go: () => import('highlight.js/lib/languages/go'),
  ini: () => import('highlight.js/lib/languages/ini'),
  java: () => import('highlight.js/lib/languages/java'),
  javascript: () => import('highlight.js/lib/languages/javascript'),
  json: () => import('highlight.js/lib/languages/json'),
  markdown: () => import('highlight.js/lib/languages/markdown'),
  python: () => import('highlight.js/lib/languages/python'),
  rust: () => import('highlight.js/lib/languages/rust'),
  sql: () => import('highlight.js/lib/languages/sql'),
  typescript: () => import('highlight.js/lib/languages/typescript'),
  xml: () => import('highlight.js/lib/languages/xml'),
  yaml: () => import('highlight.js/lib/languages/yaml'),
};

const aliases: Record<string, string> = {
  sh: 'bash', shell: 'bash', zsh: 'bash', console: 'bash',
  'c++': 'cpp', cc: 'cpp', h: 'c', hpp: 'cpp',
  golang: 'go',
  toml: 'ini', conf: 'ini',
  js: 'javascript', jsx: 'javascript', mjs: 'javascript',
  md: 'markdown',
  py: 'python', python3: 'python',
  rs: 'rust',
  ts: 'typescript', tsx: 'typescript',
  html: 'xml', svg: 'xml', svelte: 'xml', vue: 'xml',
  yml: 'yaml',
  patch: 'diff',
};

export interface Job {
  id: number;
  language: string;
  source: string;
}

export interface Coloured {
  id: number;
  /** '' when the language is not known. */
  html: string;
}

let core: Promise<HLJSApi> | null = null;

async function coloured(asked: string, source: string): Promise<string> {
  const name = aliases[asked] ?? asked;
  const loader = loaders[name];
  if (loader === undefined) return '';
  core ??= import('highlight.js/lib/core').then((module) => module.default);
  const [hljs, language] = await Promise.all([core, loader()]);
  if (hljs.getLanguage(name) === undefined) hljs.registerLanguage(name, language.default);
  // The highlighter escapes the source.
  return hljs.highlight(source, { language: name, ignoreIllegals: true }).value;
}

self.addEventListener('message', ({ data }: MessageEvent<Job>) => {
  void coloured(data.language, data.source)
    .catch(() => '')
    .then((html) => self.postMessage({ id: data.id, html } satisfies Coloured));
});
