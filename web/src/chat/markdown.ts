// Markdown to DOM: parsed by marked, cleaned by DOMPurify, code and math kept readable.

import DOMPurify from 'dompurify';
import { Marked, type RendererObject, type TokenizerAndRendererExtension, type Tokens } from 'marked';

const INLINE_HTML = /^<\/?(?:b|i|em|strong|u|s|sub|sup|kbd|mark|small|br)\s*\/?>$/i;

function escape(text: string): string {
  return text
    .replace(/&/g, '&amp;')
    .replace(/</g, '&lt;')
    .replace(/>/g, '&gt;')
    .replace(/"/g, '&quot;');
}

/** Formulas stay as they were written: Markdown would eat their backslashes and underscores. */
function mathExtension(name: string, level: 'block' | 'inline', rule: RegExp, start: RegExp): TokenizerAndRendererExtension {
  return {
    name,
    level,
    start: (source) => source.match(start)?.index,
    tokenizer(source): Tokens.Generic | undefined {
      const match = rule.exec(source);
      return match === null ? undefined : { type: name, raw: match[0], text: match[0].trim() };
    },
    renderer: (token) =>
      level === 'block'
        ? `<pre class="math" tabindex="0">${escape(String(token.text))}</pre>\n`
        : `<span class="math">${escape(String(token.text))}</span>`,
  };
}

const renderer: RendererObject = {
  // HTML in an answer is text, except for the few inline tags that only change how words look.
  html: ({ text }) => (INLINE_HTML.test(text.trim()) ? text : escape(text)),
  // The page loads nothing from elsewhere, so a picture becomes a link to it.
  image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
  code({ text, lang }) {
    const language = escape((lang ?? '').trim().split(/\s+/)[0] ?? '');
    return (
      `<div class="code"><div class="code-head"><span>${language || 'text'}</span></div>` +
      `<pre tabindex="0"><code data-language="${language}">${escape(text)}</code></pre></div>\n`
    );
  },
  table(token) {
    const cell = (tag: string, item: Tokens.TableCell): string =>
      `<${tag}${item.align ? ` class="to-${item.align}"` : ''}>${this.parser.parseInline(item.tokens)}</${tag}>`;
    const head = token.header.map((item) => cell('th', item)).join('');
    const rows = token.rows.map((row) => `<tr>${row.map((item) => cell('td', item)).join('')}</tr>`).join('');
    return `<div class="table" tabindex="0"><table><thead><tr>${head}</tr></thead><tbody>${rows}</tbody></table></div>\n`;
  },
};

const marked = new Marked({
  gfm: true,
  breaks: false,
  renderer,
  extensions: [
    mathExtension('mathBlock', 'block', /^(?:\$\$[\s\S]+?\$\$|\\\[[\s\S]+?\\\])(?:\n+|$)/, /\$\$|\\\[/),
    mathExtension('mathParen', 'inline', /^\\\([\s\S]+?\\\)|^\\\[[\s\S]+?\\\]/, /\\[([]/),
    mathExtension('mathDollar', 'inline', /^\$\$[^$]+?\$\$|^\$(?![\s\d])(?:\\.|[^$\\\n])+?(?<!\s)\$(?!\d)/, /\$/),
  ],
});

const purifier = DOMPurify(window);
purifier.addHook('afterSanitizeAttributes', (node) => {
  if (node.tagName !== 'A' || !node.hasAttribute('href')) return;
  node.setAttribute('target', '_blank');
  node.setAttribute('rel', 'noopener noreferrer');
});

/** Rendered and cleaned; what is not in these lists does not get into the page. */
export function renderMarkdown(source: string): DocumentFragment {
  const html = marked.parse(source, { async: false });
  return purifier.sanitize(html, {
    RETURN_DOM_FRAGMENT: true,
    ALLOWED_TAGS: [
      ...['a', 'b', 'i', 'em', 'strong', 'u', 's', 'del', 'sub', 'sup', 'kbd', 'mark', 'small', 'br', 'hr', 'p', 'div'],
      ...['span', 'h1', 'h2', 'h3', 'h4', 'h5', 'h6', 'ul', 'ol', 'li', 'blockquote', 'pre', 'code', 'input'],
      ...['table', 'thead', 'tbody', 'tr', 'th', 'td'],
    ],
    ALLOWED_ATTR: ['href', 'title', 'class', 'start', 'type', 'checked', 'disabled', 'data-language', 'tabindex'],
    // Every other value must look like an address that may be followed.
    ADD_URI_SAFE_ATTR: ['start', 'type', 'checked', 'disabled', 'data-language', 'tabindex'],
    ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|#)/i,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
  });
}
