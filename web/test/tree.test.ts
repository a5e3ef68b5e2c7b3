import { describe, expect, it } from 'vitest';
import { lastLeaf, pathTo, requestBody, siblings, subtree, titleFrom } from '../src/chat/tree';
import { DEFAULT_PARAMS, type Message } from '../src/chat/types';

let clock = 0;
function message(id: string, parent: string | null, role: Message['role'], content = id): Message {
  clock += 1;
  return { id, parent, role, content, conversation: 'c', created: clock };
}

const q1 = message('q1', null, 'user');
const a1 = message('a1', 'q1', 'assistant');
const a2 = message('a2', 'q1', 'assistant');
const q2 = message('q2', 'a1', 'user');
const a3 = message('a3', 'q2', 'assistant');
const q1b = message('q1b', null, 'user');
const all = [q1, a1, a2, q2, a3, q1b];

describe('the tree of messages', () => {
  it('has one path to each leaf', () => {
    expect(pathTo(all, 'a3').map(({ id }) => id)).toEqual(['q1', 'a1', 'q2', 'a3']);
    expect(pathTo(all, 'a2').map(({ id }) => id)).toEqual(['q1', 'a2']);
    expect(pathTo(all, null)).toEqual([]);
    expect(pathTo(all, 'gone')).toEqual([]);
  });

  it('ends even when stored parents form a ring', () => {
    const ring = [message('x', 'y', 'user'), message('y', 'x', 'user')];
    expect(pathTo(ring, 'x').length).toBeLessThanOrEqual(3);
  });

  it('knows the versions at one place', () => {
    expect(siblings(all, a2).map(({ id }) => id)).toEqual(['a1', 'a2']);
    expect(siblings(all, q1b).map(({ id }) => id)).toEqual(['q1', 'q1b']);
  });

  it('goes to the end of the branch that was written last', () => {
    expect(lastLeaf(all, 'a1')).toBe('a3');
    expect(lastLeaf(all, 'q1')).toBe('a2');
    expect(lastLeaf(all, 'q1b')).toBe('q1b');
  });

  it('deletes a message with what follows it', () => {
    expect([...subtree(all, 'a1')].sort()).toEqual(['a1', 'a3', 'q2']);
  });
});

describe('the request', () => {
  const settings = { system: '', params: DEFAULT_PARAMS };

  it('sends the branch, and only parameters that are set', () => {
    expect(requestBody(settings, 'm', [q1, a1, q2])).toEqual({
      model: 'm',
      stream: true,
      stream_options: { include_usage: true },
      messages: [
        { role: 'user', content: 'q1' },
        { role: 'assistant', content: 'a1' },
        { role: 'user', content: 'q2' },
      ],
    });
  });

  it('puts the system prompt first and sends what is set', () => {
    const body = requestBody(
      { system: 'Be brief.', params: { ...DEFAULT_PARAMS, temperature: 0, seed: 7, stop: ['\n'], stream: false } },
      'm',
      [q1],
    );
    expect(body).toMatchObject({ stream: false, temperature: 0, seed: 7, stop: ['\n'] });
    expect(body).not.toHaveProperty('stream_options');
    expect(body).not.toHaveProperty('top_p');
    expect((body.messages as unknown[])[0]).toEqual({ role: 'system', content: 'Be brief.' });
  });

  it('leaves out empty answers and joins the turns around them', () => {
    const failed = message('f', 'q1', 'assistant', '');
    const again = message('again', 'f', 'user', 'Once more');
    expect(requestBody(settings, 'm', [q1, failed, again]).messages).toEqual([{ role: 'user', content: 'q1\n\nOnce more' }]);
  });

  it('does not show the model its own thoughts', () => {
    const thought = message('t', 'q1', 'assistant', '<think>hm</think>\n\nYes.');
    expect(requestBody(settings, 'm', [q1, thought, q2]).messages).toContainEqual({ role: 'assistant', content: 'Yes.' });
  });
});

it('titles are one short line', () => {
  expect(titleFrom('  What\n is   it? ')).toBe('What is it?');
  expect(titleFrom('x'.repeat(80))).toHaveLength(60);
});
