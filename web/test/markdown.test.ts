// @vitest-environment jsdom
import { describe, expect, it } from 'vitest';
import { renderMarkdown } from '../src/chat/markdown';

function html(source: string): string {
  const box = document.createElement('div');
  box.append(renderMarkdown(source));
  return box.innerHTML;
}

describe('markdown', () => {
  it('becomes elements', () => {
    const out = html('# Title\n\n**bold** and `code`\n\n- a\n- b\n\n| x |\n|--:|\n| 1 |');
    for (const part of ['<h1>Title</h1>', '<strong>bold</strong>', '<code>code</code>', '<li>a</li>', 'class="to-right"']) {
      expect(out).toContain(part);
    }
  });

  it('keeps code as it was written, with its language', () => {
    const out = html('```html\n<script>alert(1)</script>\n```');
    expect(out).toContain('data-language="html"');
    expect(out).toContain('&lt;script&gt;alert(1)&lt;/script&gt;');
  });

  it('leaves formulas alone', () => {
    const out = html('With \\(a_1 + b_2\\) and $x_i * y_i$ and\n\n\\[\\sum_i a_i\\]\n\n$$e^{i\\pi}$$\n\nfor $5 and $6.');
    for (const formula of ['\\(a_1 + b_2\\)', '$x_i * y_i$', '\\[\\sum_i a_i\\]', '$$e^{i\\pi}$$']) {
      expect(out).toContain(`>${formula}<`);
    }
    expect(out).toContain('for $5 and $6.');
    expect(out).not.toContain('<em>');
  });

  it('opens links elsewhere without telling where they were', () => {
    expect(html('[x](https://example.com)')).toContain('target="_blank" rel="noopener noreferrer"');
  });

  it('turns pictures into links', () => {
    const out = html('![a cat](https://example.com/cat.png)');
    expect(out).not.toContain('<img');
    expect(out).toContain('href="https://example.com/cat.png"');
  });
});

describe('what an answer must not do', () => {
  const attacks = [
    '<script>window.hacked = 1</script>',
    '<img src=x onerror="window.hacked = 1">',
    '<svg onload="window.hacked = 1"><circle /></svg>',
    '<iframe src="javascript:parent.hacked = 1"></iframe>',
    '<a href="javascript:window.hacked = 1">x</a>',
    '[x](javascript:window.hacked=1)',
    '[x](  jAvAsCrIpT:window.hacked=1)',
    '[x](data:text/html;base64,PHNjcmlwdD4=)',
    '[x](vbscript:x)',
    '![x](x" onerror="window.hacked=1)',
    '<form action="/api/invite"><input name="a"></form>',
    '<style>body { display: none }</style>',
    '<b style="position:fixed" onclick="window.hacked=1">b</b>',
    '<math><mtext><table><mglyph><style><img src=x onerror=window.hacked=1>',
    '`<img src=x onerror=window.hacked=1>`',
    '```<img src=x onerror=window.hacked=1>\ncode\n```',
    '<details open ontoggle="window.hacked=1">x</details>',
    '$<img src=x onerror=window.hacked=1>$',
    '| <img src=x onerror=window.hacked=1> |\n|---|\n| <script>1</script> |',
    '<https://example.com/"onmouseover="window.hacked=1>',
  ];

  it.each(attacks)('%s', (source) => {
    const fragment = renderMarkdown(source);
    const allowed = new Set(['target', 'rel', 'href', 'class', 'title', 'tabindex', 'data-language', 'start', 'type', 'checked', 'disabled']);
    for (const element of fragment.querySelectorAll('*')) {
      expect(['SCRIPT', 'IMG', 'SVG', 'IFRAME', 'STYLE', 'FORM', 'MATH', 'DETAILS', 'OBJECT', 'LINK', 'META']).not.toContain(
        element.tagName.toUpperCase(),
      );
      for (const { name, value } of element.attributes) {
        expect(allowed.has(name), `${name} on ${element.tagName}`).toBe(true);
        if (name === 'href') expect(value).toMatch(/^(https?:|mailto:|#)/i);
      }
    }
  });
});
